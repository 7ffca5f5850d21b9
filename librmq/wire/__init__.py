"""The wire: servers for clients of other processes and languages, and routes to brokers of other processes.

`librmq.wire.grpc` serves the official clients of RocketMQ 5 (extra ``grpc``), `librmq.wire.remoting` those of 4.x.
`librmq.wire.remote` has the route of `librmq.connect`, and `librmq.wire.share` lets processes share a store.
"""
