"""Send a message with the official Python client, due ten minutes after the send: ``delayed.py HOST:PORT``."""

from __future__ import annotations

import sys
import time

from rocketmq import ClientConfiguration, Credentials, Message, Producer

message = Message()
message.topic, message.body = "later", b"x"
message.delivery_timestamp = int(time.time()) + 600  # noqa: TID251 (as a user of the client writes it)
producer = Producer(ClientConfiguration(sys.argv[1], Credentials()), ("later",))
producer.startup()
producer.send(message)
producer.shutdown()
