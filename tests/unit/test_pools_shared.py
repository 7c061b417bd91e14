"""SharedPool: memory that another process sees, tensors that stay themselves, and a named error when there is none."""

import errno
import fcntl
import gc
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from pdxfer.core.reasons import Refused
from pdxfer.pools import PoolLayout, SharedPool, memory, moving

torch = pytest.importorskip("torch")

LAYOUT = PoolLayout("kv", "bfloat16", (16, 3, 64), 16, planes=6, planes_per_layer=2)


@pytest.fixture(params=["swap", "set"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of moving a storage: the one of newer torch, and the one that every torch has."""
    if request.param == "set":
        monkeypatch.setattr(moving, "_can_swap", lambda storage: False)
    elif not hasattr(torch.zeros(1).untyped_storage(), "_swap_data_ptr_"):
        pytest.skip("this torch cannot swap a storage's memory")
    return str(request.param)


def test_allocate_views_and_tensors_are_the_same_bytes() -> None:
    with SharedPool.allocate(LAYOUT, 5) as pool:
        views, tensors, layers, pages = pool.views(), pool.torch(), pool.torch(by_layer=True), pool.pages()
        assert [v.shape for v in views] == [(5, 16, 3, 64)] * 6 and layers[0].shape == (2, 5, 16, 3, 64)
        assert not any(v.any() for v in views)
        for i, tensor in enumerate(tensors):
            tensor.fill_(i + 1)
        tensors[3][4].fill_(99)
        assert float(layers[1][1, 4, 0, 0, 0]) == 99
        assert views[3][4].tobytes() == pages[3][4].tobytes() == tensors[3][4].view(torch.uint8).numpy().tobytes()
        assert (views[0] == views[0].flat[0]).all() and views[0].flat[0] != views[1].flat[0]
        at = pool.at(first_fd=3)
        assert at.num_pages == 5 and {p.fd for p in at.planes} == {3} and at.spec == LAYOUT.spec()
        for plane in at.planes:
            assert plane.offset + 4 * plane.stride + LAYOUT.page_bytes <= pool.fd_bytes[0]


def test_memory_is_sealed_and_reserved() -> None:
    with SharedPool.allocate(LAYOUT, 50) as pool:
        (fd,) = pool.fds
        found = os.fstat(fd)
        assert found.st_blocks * 512 >= found.st_size == pool.fd_bytes[0]
        for size in (0, found.st_size * 2):
            with pytest.raises(OSError):
                os.ftruncate(fd, size)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


def test_views_outlive_the_pool_and_close_twice_is_once() -> None:
    pool = SharedPool.allocate(LAYOUT, 2)
    view, tensor = pool.views()[0], pool.torch()[0]
    (fd,) = pool.fds
    pool.close()
    pool.close()
    del pool
    gc.collect()
    view[0] = 7
    assert tensor[0].view(torch.int16).eq(7).all()
    with pytest.raises(OSError):
        os.fstat(fd)


def test_a_closed_pool_says_so() -> None:
    pool = SharedPool.allocate(LAYOUT, 2)
    pool.close()
    assert pool.fds == ()
    with pytest.raises(ValueError, match="closed"):
        pool.views()


def test_adopt_keeps_identity_and_content(way: str) -> None:
    tensors = [torch.randn(2, 10, 16, 3, 8) for _ in range(4)]
    copies, ids = [t.clone() for t in tensors], [id(t) for t in tensors]
    pool = SharedPool.adopt("kv", tensors, 16, page_dim=1)
    assert [id(t) for t in tensors] == ids
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    assert pool.layout.planes == 8 and pool.num_pages == 10
    for layer, tensor in enumerate(tensors):
        for half in range(2):
            assert np.array_equal(pool.views()[2 * layer + half], tensor[half].numpy())
    tensors[2][1, 3] = 5
    assert (pool.views()[5][3] == 5).all()
    pool.views()[0][9] = -1
    assert (tensors[0][0, 9] == -1).all()


def test_adopt_tensors_of_one_storage(way: str) -> None:
    big = torch.arange(4 * 10 * 8, dtype=torch.float32).reshape(4, 10, 8).clone()  # no view itself
    want = big.clone()
    views = [big[i] for i in range(4)]
    pool = SharedPool.adopt("idx", views, 8)
    assert torch.equal(big, want) and pool.fd_bytes[0] == memory.align(want.nbytes)
    big[2, 3] = 7
    assert (pool.views()[2][3] == 7).all() and (views[2][3] == 7).all()


def test_adopt_interleaved_layers(way: str) -> None:
    big = torch.arange(10 * 4 * 8, dtype=torch.int32).reshape(10, 4, 8).clone()
    pool = SharedPool.adopt("idx", [big[:, i] for i in range(4)], 8)
    assert all((pool.views()[i] == big[:, i].numpy()).all() for i in range(4))


def test_adopt_inference_tensors(way: str) -> None:
    with torch.inference_mode():
        tensor = torch.full((10, 8), 3.0)
    pool = SharedPool.adopt("kv", [tensor], 8)
    assert (pool.views()[0] == 3).all()


def test_adopt_frees_the_memory_that_it_replaces(way: str) -> None:
    tensor = torch.zeros(10, 1 << 16)
    old = weakref.ref(tensor.untyped_storage())
    before = tensor.data_ptr()
    pool = SharedPool.adopt("kv", [tensor], 8)
    gc.collect()
    assert tensor.data_ptr() != before
    assert old() is None or way == "swap"
    pool.close()
    tensor.fill_(1)  # the memory lives with the tensor


def test_views_that_were_not_passed(way: str) -> None:
    tensor = torch.zeros(10, 8)
    elsewhere = torch.empty(0).set_(tensor.untyped_storage(), 0, (80,), (1,))
    if way == "swap":
        pool = SharedPool.adopt("kv", [tensor], 8)
        elsewhere[0] = 4
        assert pool.views()[0][0, 0] == 4
    else:
        with pytest.raises(Refused, match="1 more tensors share a storage"):
            SharedPool.adopt("kv", [tensor], 8)
        tensor[0, 0] = 4
        assert elsewhere[0] == 4  # nothing was changed


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([np.zeros((4, 8))], "SharedPool.allocate"),
        ([torch.zeros(4, 8, device="meta")], "lies on meta"),
        ([torch.zeros(4, 8, requires_grad=True)], "requires gradients"),
        ([torch.zeros(4, 16)[:, :8].unsqueeze(2).expand(4, 8, 2)], "not one dense run"),
    ],
)
def test_adopt_refuses_by_name(tensors: list[object], said: str) -> None:
    with pytest.raises(Refused, match=said):
        SharedPool.adopt("kv", tensors, 8)  # type: ignore[arg-type]


def test_a_tensor_passed_twice_is_no_second_layer() -> None:
    tensor = torch.zeros(4, 8)
    with pytest.raises(Refused, match="lie in the same bytes"):
        SharedPool.adopt("kv", [tensor, tensor], 8)


def test_another_process_sees_writes_both_ways() -> None:
    tensor = torch.zeros(10, 8)
    pool = SharedPool.adopt("kv", [tensor], 8)
    tensor[3] = 3
    code = (
        "import mmap, socket, sys, numpy\n"
        "s = socket.socket(fileno=int(sys.argv[1])); raw, fds, _, _ = socket.recv_fds(s, 1, 1)\n"
        "m = mmap.mmap(fds[0], 0); a = numpy.frombuffer(m, numpy.float32, 80).reshape(10, 8)\n"
        "assert (a[3] == 3).all() and not a[4].any(); a[4] = 4; s.send(b'k')"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen([sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        socket.send_fds(ours, [b"x"], list(pool.fds))
        ours.settimeout(30)
        assert ours.recv(1) == b"k"
        assert child.wait(30) == 0
    assert (tensor[4] == 4).all()


# no memory -----------------------------------------------------------------------------------------------------------


def test_a_full_machine_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Refused, match=r"pool 'kv': 0\.\d MiB of shared memory asked for, .* available: No space left"):
        SharedPool.allocate(LAYOUT, 5)
    tensor = torch.randn(10, 8)
    want = tensor.clone()
    with pytest.raises(Refused) as caught:
        SharedPool.adopt("kv", [tensor], 8)
    assert caught.value.code == "no_shm"
    del caught  # its traceback holds the mapping
    assert torch.equal(tensor, want)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_more_than_there_is_is_not_even_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 1000)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("asked"))
    with pytest.raises(Refused, match="make the pool smaller"):
        SharedPool.allocate(LAYOUT, 5)


def test_a_second_storage_that_finds_no_room_leaves_all_tensors_usable(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    tensors = [torch.randn(10, 8) for _ in range(3)]
    copies = [t.clone() for t in tensors]
    real, calls = os.posix_fallocate, []

    def second_fails(fd: int, offset: int, size: int) -> None:
        calls.append(size)
        if len(calls) == 2:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", second_fails)
    with pytest.raises(Refused, match="Cannot allocate memory"):
        SharedPool.adopt("kv", tensors, 8)
    gc.collect()
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    for tensor in tensors:
        tensor += 1


def test_the_file_size_limit_is_a_named_error() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(Refused, match="ulimit -f"):
            SharedPool.allocate(LAYOUT, 50)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_limit_of_a_memory_cgroup_is_read(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 30000\nactive_file 20000\n")
    own = memory._of_cgroup(tmp_path)
    assert own == 150000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._of_cgroup(tmp_path) is None


# who still has it ----------------------------------------------------------------------------------------------------


def test_held_ends_with_the_last_mapping_of_a_killed_process() -> None:
    pool = SharedPool.allocate(LAYOUT, 5)
    assert not pool.held()
    theirs = memory.hold(pool.fds[0])
    assert pool.held() and pool.held()
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:  # only system calls from here on: the parent has threads
        mapping = mmap.mmap(theirs, 4096)
        os.close(theirs)
        os.write(told, mapping[:1])
        signal.pause()
        os._exit(0)
    try:
        os.close(theirs)
        os.read(ready, 1)
        assert pool.held()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)
    end = time.monotonic() + 5
    while pool.held():
        assert time.monotonic() < end
        time.sleep(0.001)
