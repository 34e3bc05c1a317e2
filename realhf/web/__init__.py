"""The rules that all HTTP servers of this package share; each server adds its routes.

- ``settings``: options and environment variables
- ``guard``: which hosts, pages and tokens are served
- ``tokens``: bearer tokens and API keys
- ``browser_auth``: cookies and CSRF tokens of browsers
- ``connections``: limits of connections and of request heads
- ``bodies``: limits of request bodies
- ``refusal``: a request that is not served
- ``certificates``: TLS of a server
"""
