"""Choosing per block: redraft after the dominant arm has drafted, route before."""
