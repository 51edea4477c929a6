"""The spine of ExpertMesh: what every process shares. Imports none of the processes."""

__version__ = "0.1.0"

PROTOCOL_REVISION = 3
"""Revision of the wire protocol; processes of different revisions refuse each other."""
