"""What the embedded adapters (``memory``, ``sqlite``) share: everything but the storage itself.

``store`` is the seam: a few atomic operations. ``group`` is the state of a consumer group as a pure object;
``consumer``, ``reader``, ``producer`` and ``log`` implement the log port over any store.
"""
