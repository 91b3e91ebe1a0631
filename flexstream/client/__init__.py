"""The control plane of producers: where the server is, who we are to it, and what to do when it is away.

Rows never pass through here; they go from `flexstream.client.producer` to the native `flexstream.cython_ext.sender`.
"""
