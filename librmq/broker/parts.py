"""The parts of one open broker, and their composition over its store."""

from __future__ import annotations

import os
from contextlib import ExitStack

from librmq.broker.administration import StoreReaders
from librmq.broker.config import BrokerConfig
from librmq.broker.context import BrokerContext, BrokerLife, BrokerSteps
from librmq.broker.delayed_messages import Deliveries
from librmq.broker.handlers import Handlers
from librmq.broker.transactions import BrokerTransactions
from librmq.clock import moves_by_itself
from librmq.config import StoreConfig
from librmq.files.seam import Files
from librmq.message.topics import HALF_TOPIC
from librmq.metrics import Metrics
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables
from librmq.store.format.checkpoint import has_abort


class BrokerParts:
    """The handlers of one broker's requests, and its scheduled steps."""

    def __init__(
        self,
        life: BrokerLife,
        steps: BrokerSteps,
        path: str,
        cluster_name: str,
        config: BrokerConfig,
        store_config: StoreConfig | None,
        files: Files,
        metrics: Metrics | None,
    ) -> None:
        """Open the store and the tables, and start the steps. Raises the errors of `MessageStore.open`."""
        self._life = life
        self._runner = runner = steps.runner
        self._metrics = metrics
        by_hand = not moves_by_itself(runner.clock)
        tables = BrokerTables.open(os.path.join(path, "config"), files=files)
        registrations = tables.registrations(runner.now_ms())
        was_killed = has_abort(files, path)
        store = self.store = MessageStore.open(
            path,
            store_config,
            files=files,
            clock=runner.clock,
            background=not by_hand,
            filters=registrations,
            replica_of=config.replica_of,
        )
        self._is_replica = config.replica_of is not None
        try:
            context = self.context = BrokerContext(
                steps, cluster_name, config, store, metrics, tables, registrations, life.changed, was_killed=was_killed
            )
            life.release_lock = lambda: context.writing.refuse(life.why_dead)
            self._housekeeping = steps.step("flushes its store", store.run_due)
            self.deliveries = Deliveries(context, self._wake_housekeeping if by_hand else None)
            self.transactions = BrokerTransactions(context, self.deliveries.arrivals)
            store.readers = StoreReaders(context, self.deliveries.schedule, self.transactions, self.deliveries.timers)
            self.handlers = Handlers(context, self.deliveries, self.transactions, life.check_open)
            self._show_gauges()
            if not self._is_replica:
                with runner.lock:
                    self.deliveries.start()
                    self.handlers.receives.start()
                    if (HALF_TOPIC, 0) in store.queues:
                        self.transactions.prepared()
            life.mark_open()
        except BaseException:
            store.close()
            raise

    def _wake_housekeeping(self) -> None:
        """Flush by a step under a manual clock."""
        if self._housekeeping.at is None:
            at = self._runner.now_ms() + round(1000 * self.store.config.flush_interval_s)
            with self._runner.lock:
                self._runner.wake(self._housekeeping, at)

    def stop_serving(self) -> None:
        """Drop held pulls and hide the gauges. Under the runner's lock."""
        self.context.held_pulls.by_queue.clear()
        if self._metrics is not None:
            for name in ("held_pulls", "log_bytes", "disk_used", "replicas"):
                self._metrics.gauge(name, None)

    def save(self) -> None:
        """Save all progress, of each part even if another part fails."""
        now_ms = self._runner.now_ms()
        with self._runner.lock, ExitStack() as saves:
            saves.callback(self.context.saving.save_all, now_ms, self._life.why_dead)
            if not self._is_replica:
                saves.callback(self.transactions.save)
                saves.callback(self.handlers.receives.save_all)
                self.deliveries.save()

    def end_writing(self) -> None:
        """End all writes; return when none is running."""
        self.context.writing.end_writing(self._life.why_dead)
        self.deliveries.end_writing(self._life.why_dead)

    def _show_gauges(self) -> None:
        metrics = self._metrics
        if metrics is not None:
            store, held = self.store, self.context.held_pulls.by_queue
            metrics.gauge("held_pulls", lambda: sum(map(len, list(held.values()))))
            metrics.gauge("replicas", lambda: self.handlers.replication.replica_count)
            metrics.gauge("log_bytes", lambda: store.log.end)
            metrics.gauge("disk_used", lambda: store.files.used_ratio(store.path))
