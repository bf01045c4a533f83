"""Machines: rates, links, prices; from datasheets or from this machine's calibration."""
