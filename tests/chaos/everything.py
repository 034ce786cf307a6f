"""Loads what a process of a schedule would load at the first use of each part, for which it may lack descriptors."""

from __future__ import annotations

from tests.places import load_product

load_product("/cli/", "/demo/", "/spark/")
