"""Run a broker inside a FastAPI application, with a coroutine as listener.

    python examples/fastapi_app.py                                 shows it, without a network
    uvicorn --factory examples.fastapi_app:make_app                serves it (one worker: one process owns a store)

The listener runs on the application's own event loop, so it shares data with the handlers without a lock. Neither a
waiting listener nor a send blocks other requests.

A group that is new in an old folder begins with the next message; ``consume_from=ConsumeFrom.FIRST`` reads all.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI, HTTPException

from librmq import Broker, DeliveredMessage, Producer, PushConsumer, StoreConfig
from librmq.protocol import Route


def make_app(route: Route | None = None, path: str = "fastapi-data") -> FastAPI:
    """Create the application with a broker in ``path``; a test passes its own route."""
    orders: dict[int, dict[str, Any]] = {}
    charged: dict[int, asyncio.Event] = defaultdict(asyncio.Event)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        broker = None if route else Broker.open(path, store_config=StoreConfig())
        where = route or broker
        assert where is not None
        billing = PushConsumer(where, "billing")
        billing.subscribe("orders")(charge)
        billing.start()
        app.state.producer = Producer(where, "shop").start()
        yield
        app.state.producer.shutdown()
        await billing.shutdown_async()
        if broker is not None:
            await asyncio.to_thread(broker.close)

    app = FastAPI(lifespan=lifespan)

    async def charge(message: DeliveredMessage) -> None:
        await asyncio.sleep(0)  # stands for a call to a bank
        number = int(message.keys[0])
        orders[number]["state"] = "charged"
        charged[number].set()

    @app.post("/orders", status_code=202)
    async def order(product: str) -> dict[str, Any]:
        number = len(orders) + 1
        orders[number] = {"number": number, "product": product, "state": "new"}
        await app.state.producer.send_async("orders", product.encode(), keys=str(number))
        return {"number": number}

    @app.get("/orders/{number}")
    async def state(number: int, wait: bool = False) -> dict[str, Any]:
        if number not in orders:
            raise HTTPException(404, "there is no such order")
        if wait:
            await charged[number].wait()
        return orders[number]

    return app


def client_of(app: FastAPI) -> httpx.AsyncClient:
    """Call the application directly, without a network."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop")


async def main() -> None:
    with Broker.temporary() as broker:
        app = make_app(broker)
        async with app.router.lifespan_context(app), client_of(app) as shop:
            for product in ("coat", "hat"):
                placed = await shop.post("/orders", params={"product": product})
                print(f"POST /orders?product={product}: {placed.status_code} {placed.json()}")
            for number in (1, 2):
                found = await shop.get(f"/orders/{number}", params={"wait": True})
                print(f"GET /orders/{number}?wait=true: {found.json()}")


if __name__ == "__main__":
    asyncio.run(main())
