"""The trainer: assembles groups, trains on them, checkpoints, and publishes each policy version."""
