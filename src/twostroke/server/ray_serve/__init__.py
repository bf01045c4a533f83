"""The server past one machine: what Ray Serve starts, and how it chooses and scales. `twostroke.server.ray_app` puts it together."""
