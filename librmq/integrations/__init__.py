"""Interfaces of other projects to librmq, over public names only: kombu's transport for Celery, and Django's tasks.

Nothing of librmq imports them: an application, kombu or Django does, by name.
"""
