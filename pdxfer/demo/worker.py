"""A worker process: an engine, its pools attached to the node's sidecar, and a small HTTP service on loopback.

Owns: the command line, the HTTP routes and the process's life. Must not: know how a request is served; ``prefill`` and
``decode`` do.

    python -m pdxfer.demo.worker --role prefill --engine-id prefill-0 --sidecar /run/pdxfer/worker.sock --port 8101 --engine smollm2

POST /prefill  {room, epoch, tokens}                              one JSON object when the room has ended
POST /decode   {room, epoch, source, length, max_tokens}          a JSON object a line: admitted, tokens, the end
POST /abort    {room, epoch, detail}                              also for a room that has not come yet
GET  /health   200 while requests can be served                   GET /stats  pages, rooms, ends by reason
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from types import FrameType
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdxfer.client import AsyncClient, PdxferError

from .decode import DecodeWorker
from .ends import Failure
from .engine import Engine
from .prefill import PrefillWorker
from .requests import AbortAsk, DecodeAsk, Job, PrefillAsk, Worker
from .web import ClientGone, Streamed, answer, body_of, unless_gone

log = logging.getLogger("pdxfer.demo")
MAX_BODY = 4 << 20
CLOSE_SECONDS = 5.0


def application(engine_id: str, worker: Worker) -> Starlette:
    """The HTTP service of a worker."""

    async def ask(request: Request, kind: type[Any]) -> Any:
        try:
            return msgspec.json.decode(await body_of(request, MAX_BODY), type=kind)
        except msgspec.MsgspecError as error:
            raise Failure("bad_request", f"{request.url.path}: {error}") from error

    def named(route: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                return await route(request)
            except Failure as failure:
                return answer({"error": failure.json()}, failure.status)

        return handle

    async def prefill(request: Request) -> Response:
        assert isinstance(worker, PrefillWorker)
        job = worker.prefill(await ask(request, PrefillAsk))
        try:
            last = await unless_gone(request.receive, job.last())
        except ClientGone:
            worker.stop(job, "the HTTP client went away")
            return Response(status_code=499)
        if "error" in last:
            raise Failure.of_json(last["error"])
        return answer(last)

    async def decode(request: Request) -> Response:
        assert isinstance(worker, DecodeWorker)
        job = worker.decode(await ask(request, DecodeAsk))
        # An ended request does not mind being stopped.
        return Streamed(_lines(job), "application/x-ndjson", lambda: worker.stop(job, "the HTTP client went away"))

    async def abort(request: Request) -> Response:
        found: AbortAsk = await ask(request, AbortAsk)
        return answer({"here": await worker.abort(found.room, found.epoch, found.detail)})

    async def health(request: Request) -> Response:
        if worker.sidecar.connected:
            return answer(
                {"ok": True, "engine_id": engine_id, "node": worker.sidecar.node, "engine": worker.engine.name}
            )
        return answer({"ok": False, "problem": f"no sidecar: {worker.sidecar.problem}"}, 503)

    async def stats(request: Request) -> Response:
        return answer({"pid": os.getpid(), "engine_id": engine_id, "engine": worker.engine.name} | worker.stats())

    routes = [
        Route(f"/{worker.role}", named(prefill if isinstance(worker, PrefillWorker) else decode), methods=["POST"]),
        Route("/abort", named(abort), methods=["POST"]),
        Route("/health", health),
        Route("/stats", stats),
    ]
    return Starlette(routes=routes)


async def _lines(job: Job) -> AsyncIterator[bytes]:
    async for line in job.lines():
        yield msgspec.json.encode(line) + b"\n"


class Server(uvicorn.Server):
    """uvicorn, told to abort its streams before it waits for them."""

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_exit()
        super().handle_exit(sig, frame)


async def serve(args: argparse.Namespace, engine: Engine) -> None:
    """Attach and serve until a signal. Raises PdxferError when there is no sidecar."""
    sidecar = await AsyncClient.connect(
        args.sidecar, args.engine_id, args.role, engine.pools, timeout=args.attach_timeout, wait=True
    )
    worker: Worker
    if args.role == "prefill":
        worker = PrefillWorker(engine, sidecar, admission=args.admission)
    else:
        worker = DecodeWorker(engine, sidecar, admission=args.admission, max_batch=args.max_batch)

    @contextlib.asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        yield  # uvicorn ends the process by the signal that it was sent, so what is to be done must be done in here
        await worker.close(CLOSE_SECONDS)
        await sidecar.close()

    app = application(args.engine_id, worker)
    app.router.lifespan_context = life
    await listen(app, args.port, lambda: worker.drain("the worker is shutting down"))


async def listen(app: Starlette, port: int, on_exit: Callable[[], None]) -> None:
    """Serve on loopback until SIGTERM or SIGINT."""
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=3,
        backlog=1024,
    )
    loop = asyncio.get_running_loop()

    def told() -> None:
        loop.call_soon_threadsafe(on_exit)  # we are in a signal handler

    await Server(config, told).serve()


def build(args: argparse.Namespace) -> Engine:
    """The engine that the command line names. Raises ModelMissing, Refused."""
    if args.engine == "synthetic":
        from .synthetic import SyntheticEngine

        return SyntheticEngine(
            args.pages or 3072, page_tokens=args.page_tokens, layers=args.layers, step_delay=args.step_delay
        )
    from .smollm2 import SmolLM2Engine

    return SmolLM2Engine(args.pages or 1024, page_tokens=args.page_tokens, dtype=args.dtype, threads=args.threads)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdxfer.demo.worker", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--role", choices=("prefill", "decode"), required=True)
    parser.add_argument("--engine-id", required=True)
    parser.add_argument("--sidecar", required=True, metavar="SOCKET", help="the sidecar's worker socket")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", choices=("smollm2", "synthetic"), required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of smollm2 and its cache")
    parser.add_argument("--pages", type=int, default=0, help="0: 1024 (smollm2) or 3072 (synthetic)")
    parser.add_argument("--page-tokens", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4, help="of the synthetic engine")
    parser.add_argument("--step-delay", type=float, default=0.03, help="seconds of a synthetic decode step")
    parser.add_argument("--threads", type=int, default=1, help="that the model computes with")
    parser.add_argument("--max-batch", type=int, default=64, help="requests in a decode step")
    parser.add_argument("--admission", type=float, default=120.0, help="seconds that a request waits for pages")
    parser.add_argument(
        "--attach-timeout", type=float, default=60.0, help="seconds to wait for the sidecar at the start"
    )
    return parser


def main() -> int:
    args = arguments().parse_args()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {args.engine_id} %(levelname)s %(message)s")
    from pdxfer.core.reasons import Refused

    from .model import ModelMissing

    try:
        engine = build(args)
        log.info("engine %s is ready: %s", engine.name, ", ".join(map(repr, engine.pools)))
        asyncio.run(serve(args, engine))
    except (ModelMissing, Refused, PdxferError) as error:
        print(f"error: {args.role} worker {args.engine_id}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
