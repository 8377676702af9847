"""Programs that do what the reward operator does, each as its users would write it: see ``benchmarks.exactly_once``."""
