"""Rules of thumb that articles on training and inference repeat, each computed: where it holds and where it breaks."""
