"""Replicas: stores that follow the commit log of another byte for byte, and serve reads without it."""

from __future__ import annotations

from librmq.replica.config import ReplicaConfig as ReplicaConfig
from librmq.replica.replica import Replica as Replica
from librmq.replica.replica import promote as promote
from librmq.replica.stored_master import StoredMaster as StoredMaster

__all__ = ["Replica", "ReplicaConfig", "StoredMaster", "promote"]
