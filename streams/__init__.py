"""The log: one port with Kafka, SQLite and memory adapters, its topics, and what is built on it alone.

``log`` is the port, ``topics`` the catalogue, ``loop`` exactly-once processing, ``reading`` whole topics, ``audit`` the
ledger. Nothing here knows an operator.
"""
