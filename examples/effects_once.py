"""An effect that happens once, in the session of your framework: Django, Flask, FastAPI, peewee, SQLModel.

Each recipe makes its tables and returns a listener, and a function that reads the balance. Each message is delivered
twice here, and paid once. Run it with the names of the recipes whose packages you have:

    python effects_once.py django peewee
"""

import asyncio
import inspect
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from librmq import Broker, ConsumeFrom, DeliveredMessage, ManualRunner, Producer, PushConsumer
from librmq.idempotence import transactional, upgrade_tables

PAY = "UPDATE accounts SET balance = balance - 10 WHERE id = 7"
BALANCE = "SELECT balance FROM accounts WHERE id = 7"
Recipe = tuple[Callable[[Any], Any], Callable[[], int]]
TABLES = ("CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER)", "INSERT INTO accounts VALUES (7, 100)")


def django(path: Path) -> Recipe:
    import django
    from django.conf import settings

    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": path}
    settings.configure(DATABASES={"default": database}, INSTALLED_APPS=["librmq.integrations.django"])
    django.setup()
    from django.db import connection

    def execute(statement: str) -> int:
        with connection.cursor() as cursor:
            cursor.execute(statement)
            return int(cursor.fetchone()[0]) if statement == BALANCE else 0

    upgrade_tables(connection)
    for statement in TABLES:
        execute(statement)

    def pay(message: DeliveredMessage) -> None:
        with transactional(connection, message, group="billing") as first:
            if first:
                execute(PAY)  # or any model's save

    return pay, lambda: execute(BALANCE)


def flask(path: Path) -> Recipe:
    from flask import Flask
    from flask_sqlalchemy import SQLAlchemy
    from sqlalchemy import text

    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{path}"
    db = SQLAlchemy(app)
    with app.app_context():
        upgrade_tables(db.session)
        for statement in TABLES:
            db.session.execute(text(statement))
        db.session.commit()

    def pay(message: DeliveredMessage) -> None:
        with app.app_context(), transactional(db.session, message, group="billing") as first:
            if first:
                db.session.execute(text(PAY))

    def balance() -> int:
        with app.app_context():
            return int(db.session.execute(text(BALANCE)).scalar_one())

    return pay, balance


def fastapi(path: Path) -> Recipe:
    """`fastapi_app.py` shows where an application starts and ends its consumer."""
    from sqlalchemy import create_engine, text
    from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

    engine = create_engine(f"sqlite:///{path}")
    upgrade_tables(engine)
    with engine.begin() as connection:
        for statement in TABLES:
            connection.execute(text(statement))
    sessions = async_sessionmaker(create_async_engine(f"sqlite+aiosqlite:///{path}"))

    async def pay(message: DeliveredMessage) -> None:
        async with sessions() as session, transactional(session, message, group="billing") as first:
            if first:
                await session.execute(text(PAY))

    def balance() -> int:
        with engine.connect() as connection:
            return int(connection.execute(text(BALANCE)).scalar_one())

    return pay, balance


def peewee(path: Path) -> Recipe:
    from peewee import SqliteDatabase

    db: Any = SqliteDatabase(str(path))
    upgrade_tables(db.connection())
    for statement in TABLES:
        db.execute_sql(statement)

    def pay(message: DeliveredMessage) -> None:
        with db.atomic(), transactional(db.connection(), message, group="billing", join=True) as first:
            if first:
                db.execute_sql(PAY)  # or any model's save

    return pay, lambda: db.execute_sql(BALANCE).fetchone()[0]


def sqlmodel(path: Path) -> Recipe:
    from sqlalchemy import text
    from sqlmodel import Session, create_engine

    engine = create_engine(f"sqlite:///{path}")
    upgrade_tables(engine)
    with engine.begin() as connection:
        for statement in TABLES:
            connection.execute(text(statement))

    def pay(message: DeliveredMessage) -> None:
        with Session(engine) as session, transactional(session, message, group="billing") as first:
            if first:
                session.connection().execute(text(PAY))  # or session.add(…)

    def balance() -> int:
        with engine.connect() as connection:
            return int(connection.execute(text(BALANCE)).scalar_one())

    return pay, balance


RECIPES = {"django": django, "flask": flask, "fastapi": fastapi, "peewee": peewee, "sqlmodel": sqlmodel}


def run(name: str, path: Path) -> int:
    listener, balance = RECIPES[name](path)

    def twice(message: DeliveredMessage) -> None:
        for _ in range(2):
            done = listener(message)
            if inspect.iscoroutine(done):
                asyncio.run(done)

    runner = ManualRunner()
    with Broker.temporary(runner=runner) as broker:
        consumer = PushConsumer(broker, "billing", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders", twice)
        consumer.start()
        Producer(broker, "shop").send("orders", b"one coat", keys="order-1")
        runner.advance(1000)
        consumer.shutdown()
    return balance()


if __name__ == "__main__":
    for name in sys.argv[1:] or RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: 100 - 10 = {run(name, Path(folder) / 'shop.db')}")
