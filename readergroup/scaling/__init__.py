"""Readers by the number that is needed: policies, pools of workers, callbacks."""
