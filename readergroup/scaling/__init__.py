"""Scales the readers of a group: policies, pools of workers, callbacks."""
