"""Drills: deployments over several sites fail according to a script, and report what was lost, delayed and repeated."""

from __future__ import annotations

from librmq.lazy_exports import lazy_exports

with lazy_exports(globals()):
    from librmq.testing.drills.drill import Deployment as Deployment
    from librmq.testing.drills.drill import DrillReport as DrillReport
    from librmq.testing.drills.drill import Fault as Fault
    from librmq.testing.drills.drill import one_active as one_active
    from librmq.testing.drills.drill import one_active_replicated as one_active_replicated
    from librmq.testing.drills.drill import one_cluster as one_cluster
    from librmq.testing.drills.drill import outages as outages
    from librmq.testing.drills.drill import presets as presets
    from librmq.testing.drills.drill import run_drill as run_drill
    from librmq.testing.drills.drill import two_active as two_active
    from librmq.testing.drills.drill import two_active_routed as two_active_routed
