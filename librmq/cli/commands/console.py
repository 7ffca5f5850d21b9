"""``console``: pages about a store or a cluster, for a browser on this machine."""

from __future__ import annotations

import argparse
import secrets
import socket
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from librmq.cli._output import Output, complain, end_signals
from librmq.cli._stores import folder_of_place, names_cluster
from librmq.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from librmq.broker import AdministeredRoute

_STOP_S: Final = 5.0


def console(arguments: argparse.Namespace, output: Output) -> int:
    """Serve the pages until a signal ends it."""
    try:
        import uvicorn

        from librmq.console import console as pages_of
    except ModuleNotFoundError as error:
        raise MissingExtraError("the console", "console") from error
    output = output.of_lines()
    secret = secrets.token_urlsafe(24)
    with end_signals() as ended, ExitStack() as opened:
        route, folder = _place(arguments, opened)
        listening = opened.enter_context(_listen(arguments.port))
        port = listening.getsockname()[1]
        application = pages_of(
            route if route is not None else str(folder),
            folder=folder,
            allow_changes=arguments.allow_changes,
            bodies=not arguments.no_bodies,
            hosts=(f"127.0.0.1:{port}", f"localhost:{port}"),
            secret=secret,
        )
        config = uvicorn.Config(application, log_config=None, lifespan="off", access_log=False, server_header=False)
        server = uvicorn.Server(config)
        # Signals reach the main thread, which waits for them here, so the server leaves them alone in its own.
        serving = threading.Thread(target=server.run, args=([listening],), name="librmq console", daemon=True)
        serving.start()
        output.row({"ready": True, "url": f"http://127.0.0.1:{port}/?secret={secret}"})
        output.flush()
        if arguments.allow_changes and route is None:
            complain("note: no process shares this store, so the console only shows it")
        ended.wait()
        server.should_exit = True
        serving.join(_STOP_S)
    return 0


def _place(arguments: argparse.Namespace, opened: ExitStack) -> tuple[AdministeredRoute | None, str | None]:
    """Return the route to the cluster that is named, or the folder, with the route to its owner where one shares it."""
    from librmq.cli._routes import connect_to
    from librmq.wire.share_links import connect_to_sharing

    place = arguments.place
    log_paths = arguments.log_path or ()
    if names_cluster(place):
        if log_paths:
            raise InputError(f"--log-path: expected it with the folder of a store, found {place}")
        arguments.route = place
        return opened.enter_context(connect_to(arguments)), None
    folder = folder_of_place(place, log_paths)
    return opened.enter_context(connect_to_sharing(folder)), folder


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on this machine alone."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise InputError(f"--port {port}: {error.strerror}: name another, or 0 for a free one") from None
