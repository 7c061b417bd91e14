"""One module per subcommand of ``pdxfer``, imported only when it is called.

Each module has a click command of its own name, or called ``command``.
"""
