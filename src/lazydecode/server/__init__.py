"""The HTTP face

May import:  OpenAI routes, render, health, metrics.:everything below.
"""
