"""Serve a broker to clients of RocketMQ 4.x, ``mqadmin`` and the dashboard: a name server and a broker on one port.

::

    from librmq.wire.remoting import RemotingServer, listen

    listening = listen(port=9876)
    with Broker.open("data", store_config=StoreConfig(store_host="127.0.0.1:9876")) as broker:
        with RemotingServer(broker, listening=listening) as server:
            print(server.address)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.wire.remoting._server import RemotingServer as RemotingServer
    from librmq.wire.remoting._server import listen as listen
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.wire.remoting._server": ("RemotingServer", "listen"),
        },
    )
