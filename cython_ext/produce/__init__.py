"""The producer's side: rows by group into frames, lanes and sockets."""
