"""The server past one machine: what Ray Serve starts, where requests go, and when replicas are added. `ray_app` joins them."""
