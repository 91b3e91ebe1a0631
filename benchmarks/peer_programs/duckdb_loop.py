"""YSB with DuckDB: an aggregate query per batch of Arrow columns, on one thread, then one over their results."""

import duckdb
import pyarrow as pa
from common import WINDOW_MS, serve

QUERY = f"""
    select event_time // {WINDOW_MS} as w, campaign_id, count(*) as n
    from batch where event_type = 'view' group by all
"""


def prepare(rows):
    """DuckDB wants columns, with strings: made before the clock starts."""
    return pa.table(
        {
            "event_time": rows["event_time"].copy(),
            "campaign_id": rows["campaign_id"].copy(),
            "event_type": pa.array([value.decode() for value in rows["event_type"].tolist()]),
        }
    )


def run(table, size):
    connection = duckdb.connect()
    connection.execute("set threads to 1")
    parts = []
    for at in range(0, table.num_rows, size):
        batch = table.slice(at, size)  # noqa: F841  DuckDB finds it by its name
        found = connection.sql(QUERY)
        take = getattr(found, "to_arrow_table", None) or found.fetch_arrow_table  # the name depends on the version
        parts.append(take())
    whole = pa.concat_tables(parts)  # noqa: F841
    merged = connection.execute("select w, campaign_id, sum(n) as n from whole group by all").fetchall()
    return sum(row[2] for row in merged)


if __name__ == "__main__":
    serve(run, prepare)
