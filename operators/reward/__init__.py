"""The reward operator (kind ``reward``). What a reward function of one's own needs is in ``functions``."""
