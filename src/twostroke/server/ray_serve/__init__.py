"""The server past one machine: what Ray Serve starts, where requests go, when replicas are added. `application` joins them."""
