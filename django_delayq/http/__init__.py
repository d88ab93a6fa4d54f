"""The wire of lmstfy, for programs in any language: an app with addresses to include.

``path("", include("django_delayq.http.urls"))``. A queue of a namespace is the queue ``namespace.queue`` here.
"""
