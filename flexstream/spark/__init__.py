"""FlexStream and Spark: executors as producers, results back, and the same query on a cluster. See docs/spark.md."""
