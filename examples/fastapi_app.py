"""Run a broker inside the workers of a FastAPI application, with a coroutine as listener.

    python examples/fastapi_app.py                                 shows it, without a network
    uvicorn --factory examples.fastapi_app:make_app --workers 4    serves it

The workers share the folder of the broker: one of them owns it, and another takes over when that one ends. Each order
is charged in one of the workers, on its event loop, so neither a waiting listener nor a send blocks other requests. The
orders that all workers show are in a database beside it.

A group that is new in an old folder begins with the next message; ``consume_from=ConsumeFrom.FIRST`` reads all.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any

import httpx
from fastapi import FastAPI, HTTPException

import librmq
from librmq import Broker, DeliveredMessage, Producer, PushConsumer, Route

ORDERS = "CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY, product TEXT, state TEXT)"


def make_app(route: Route | None = None, path: str = "fastapi-data") -> FastAPI:
    """Create the application with a broker in ``path`` that its workers share; a test passes its own route."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            where: Route = await stack.enter_async_context(await librmq.share_async(path)) if route is None else route
            database = sqlite3.connect(":memory:" if route else f"{path}.db", timeout=30)
            app.state.database = stack.enter_context(closing(database))
            with database:
                database.execute(ORDERS)
            billing = PushConsumer(where, "billing")
            billing.subscribe("orders")(charge)
            billing.start()
            app.state.producer = Producer(where, "shop").start()
            yield
            app.state.producer.shutdown()
            await billing.shutdown_async()

    app = FastAPI(lifespan=lifespan)

    async def charge(message: DeliveredMessage) -> None:
        await asyncio.sleep(0)  # stands for a call to a bank
        with app.state.database as database:
            database.execute("UPDATE orders SET state = 'charged' WHERE number = ?", message.keys)

    def row_of(number: int) -> dict[str, Any]:
        row = app.state.database.execute("SELECT product, state FROM orders WHERE number = ?", (number,)).fetchone()
        if row is None:
            raise HTTPException(404, "there is no such order")
        return {"number": number, "product": row[0], "state": row[1]}

    @app.post("/orders", status_code=202)
    async def order(product: str) -> dict[str, Any]:
        with app.state.database as database:
            number = database.execute("INSERT INTO orders (product, state) VALUES (?, 'new')", (product,)).lastrowid
        await app.state.producer.send_async("orders", product.encode(), keys=str(number))
        return {"number": number}

    @app.get("/orders/{number}")
    async def state(number: int, wait: bool = False) -> dict[str, Any]:
        while wait and row_of(number)["state"] == "new":
            await asyncio.sleep(0.05)  # another worker may charge it
        return row_of(number)

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
