"""The wire: endpoints to which clients of other processes and languages connect.

`librmq.wire.grpc` serves the official clients of RocketMQ 5 (extra ``grpc``). `librmq.wire.remoting`
speaks the protocol of 4.x.
"""
