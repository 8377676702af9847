"""The commands of ``laminar``, one module each; ``cli`` imports the one that is called."""
