"""C++17 sources of the native library and their build: matrix products, the pool of threads, whole steps of the engine."""
