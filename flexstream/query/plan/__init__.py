"""A query's plan: a tree of typed nodes, from the streams that it reads to where its results go."""
