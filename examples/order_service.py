"""An order service: FastAPI, a database with an outbox, payments that count once, a timeout, a page of dead letters.

    uvicorn --factory examples.order_service:make_app --workers 4  serves it; the workers share the broker's folder
    pytest examples/test_order_service.py                          tests it, half hours of waiting included

A placed order is written together with two messages about it: one for other services, and one that comes back after
half an hour and cancels the order if it is unpaid. Payments are messages of the topic ``payments``. The tests send them
with this library and with an official client. The application opens no port for them: add a `GrpcServer` or a
`RemotingServer` if other programs are to send payments. Each payment counts once, however often it is delivered. A
payment that can't be right is a dead letter, which a person sees at ``/dead-letters`` and can send again. ``/metrics``
shows what the worker that answers has counted; docs/howto/prometheus.md shows what all of them have.

Needs ``pip install 'librmq[sql,metrics]' fastapi uvicorn``.
"""

from __future__ import annotations

import html
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import sqlalchemy
from fastapi import FastAPI, HTTPException
from fastapi.responses import HTMLResponse, PlainTextResponse
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import librmq
from librmq import (
    Broker,
    DeadLetter,
    DeliveredMessage,
    Message,
    Metrics,
    Outbox,
    OutboxSender,
    Producer,
    PushConsumer,
    Route,
)
from librmq.idempotence import transactional, upgrade_tables
from librmq.metrics import export_to_prometheus

HALF_AN_HOUR = 16
"""The delay level of 30 minutes."""


class Base(DeclarativeBase):
    """The tables of the service."""


class Order(Base):
    """An order: placed, and then paid or cancelled."""

    __tablename__ = "orders"
    number: Mapped[str] = mapped_column(primary_key=True)
    product: Mapped[str]
    state: Mapped[str] = mapped_column(default="placed")


class OrderService:
    """What happens to orders. It has a database, and a route to a broker."""

    def __init__(self, database: sqlalchemy.Engine, route: Route, metrics: Metrics | None = None) -> None:
        Base.metadata.create_all(database)
        upgrade_tables(database)
        self.database = database
        clock = route.runner.clock
        self.outbox = Outbox(clock=clock)
        self.producer = Producer(route, "order-service", metrics=metrics)
        self.sender = OutboxSender(database, self.producer, clock=clock)
        self.payments = PushConsumer(route, "order-payments", metrics=metrics)
        self.payments.subscribe("payments", self.pay)
        self.timeouts = PushConsumer(route, "order-timeouts", metrics=metrics)
        self.timeouts.subscribe("order-timeouts", self.cancel_if_unpaid)

    def start(self) -> None:
        """Join the groups, and begin to send the outbox."""
        for client in (self.producer, self.payments, self.timeouts, self.sender):
            client.start()

    def shutdown(self) -> None:
        """Leave the groups, when running listeners have ended."""
        for client in (self.sender, self.payments, self.timeouts, self.producer):
            client.shutdown()

    def place(self, number: str, product: str) -> None:
        """Write an order, and with it the messages about it: all of them or none."""
        with Session(self.database) as session, session.begin():
            session.add(Order(number=number, product=product))
            session.flush()
            self.outbox.add(session, Message("orders", json={"number": number, "product": product}, keys=number))
            self.outbox.add(session, Message("order-timeouts", number, keys=number, delay_level=HALF_AN_HOUR))

    def state(self, number: str) -> str | None:
        """Return the state of an order, or None if there is none."""
        with Session(self.database) as session:
            return session.scalar(sqlalchemy.select(Order.state).where(Order.number == number))

    def pay(self, message: DeliveredMessage) -> None:
        """Note a payment, in one transaction with the record that it was noted."""
        number = message.text()
        if self.state(number) is None:
            raise DeadLetter(f"there is no order {number}")
        with Session(self.database) as session, transactional(session, message, group="order-payments") as is_first:
            if is_first and not self._change(session, number, "paid"):
                raise DeadLetter(f"order {number} is not to be paid: it is {self.state(number)}")

    def cancel_if_unpaid(self, message: DeliveredMessage) -> None:
        """Cancel an order that is still unpaid when its time is over."""
        with Session(self.database) as session, session.begin():
            self._change(session, message.text(), "cancelled")

    @staticmethod
    def _change(session: Session, number: str, state: str) -> bool:
        """End a placed order: one conditional update, so of a payment and a timeout only one wins."""
        update = sqlalchemy.update(Order).where(Order.number == number, Order.state == "placed").values(state=state)
        return session.connection().execute(update).rowcount == 1


def make_app(database: str = "sqlite:///orders.db", path: str = "order-data", broker: Broker | None = None) -> FastAPI:
    """Make the application with a share of ``path``; a test passes its own broker."""
    metrics = Metrics()
    registry = CollectorRegistry()
    export_to_prometheus(metrics, registry)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        own = librmq.share(path, metrics=metrics) if broker is None else broker
        service = OrderService(sqlalchemy.create_engine(database), own, metrics)
        service.start()
        app.state.broker, app.state.service = own, service
        yield
        service.shutdown()
        service.database.dispose()
        if broker is None:
            own.close()

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders/{number}", status_code=202)
    def place(number: str, product: str) -> dict[str, str]:
        app.state.service.place(number, product)
        app.state.service.sender.wake()
        return {"number": number}

    @app.get("/orders/{number}")
    def state(number: str) -> dict[str, Any]:
        found = app.state.service.state(number)
        if found is None:
            raise HTTPException(404, "there is no such order")
        return {"number": number, "state": found}

    @app.get("/dead-letters")
    async def dead_letters() -> HTMLResponse:
        rows = "".join(
            f"<tr><td>{html.escape(letter.text())}<td>{html.escape(letter.properties['DEAD_LETTER_CAUSE'])}"
            for letter in app.state.broker.dead_letters("order-payments")
        )
        return HTMLResponse(
            f"<table><tr><th>order<th>cause{rows}</table>"
            '<form method="post" action="/dead-letters"><button>Send them again</button></form>'
        )

    @app.post("/dead-letters")
    async def send_again() -> dict[str, int]:
        return {"sent": app.state.broker.resend_dead_letters("order-payments")}

    @app.get("/metrics")
    def show_metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(registry).decode())

    return app
