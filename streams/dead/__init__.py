"""Dead letters for a person: what is there (``register``), and what is decided about it (``desk``)."""

from laminar.streams.dead.desk import Desk, Outcome, read_letter
from laminar.streams.dead.original import Gone, original_of
from laminar.streams.dead.register import Entry, Register, State, parse_place

__all__ = ["Desk", "Entry", "Gone", "Outcome", "Register", "State", "original_of", "parse_place", "read_letter"]
