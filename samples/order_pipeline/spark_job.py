"""Three queries in Spark. Each continues from its checkpoint, however often the job is killed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from orders import DEAD, ORDERS, PAID_WITHIN, PAYMENTS, REVENUE
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import readergroup as rg
import readergroup.spark

#: More than the disorder: the jitter of the orders, and the seconds between two flushes of the writer.
DELAY = "30 seconds"


def read(spark: SparkSession, url: str, stream: str, schema: str) -> DataFrame:
    source = spark.readStream.format("readergroup").options(url=url, serializer="json", mode="PERMISSIVE")
    return source.options(startingOffsets="earliest").schema(f"{schema}, _corrupt_record string").load(stream)


def start(spark: SparkSession, url: str, folder: str) -> list[StreamingQuery]:
    orders = read(spark, url, ORDERS, "id bigint, shop string, amount bigint, at timestamp")
    payments = read(spark, url, PAYMENTS, "id bigint, paid_at timestamp").withWatermark("paid_at", DELAY)
    good = orders.where("_corrupt_record is null").withWatermark("at", DELAY)

    dead = orders.where("_corrupt_record is not null").selectExpr("_corrupt_record AS event")
    revenue = (
        good.groupBy(F.window("at", "1 minute"), "shop")
        .agg(F.sum("amount").alias("amount"))
        .selectExpr("to_json(struct(shop, window.start AS minute, amount)) AS event", "shop AS routing_key")
    )
    in_time = F.expr(f"o.id = p.id AND paid_at BETWEEN at AND at + INTERVAL {PAID_WITHIN} SECONDS")
    paid = good.alias("o").join(payments.alias("p"), in_time).selectExpr("o.id", "shop", "amount", "at", "paid_at")

    writers = {
        "dead": dead.writeStream.format("readergroup").options(url=url, stream=DEAD),
        "revenue": revenue.writeStream.format("readergroup").options(url=url, stream=REVENUE),
        "paid": paid.writeStream.format("parquet").option("path", f"{folder}/paid"),
    }
    queries: list[StreamingQuery] = []
    for name, writer in writers.items():
        query = writer.queryName(name).option("checkpointLocation", f"{folder}/checkpoints/{name}").start()
        # One after the other: now and then Spark 4.3 cannot serialize a plan while another one is being made.
        while query.isActive and query.lastProgress is None:
            time.sleep(0.1)
        queries.append(query)
    return queries


def main(url: str, folder: str) -> None:
    spark = readergroup.spark.local_session("local[2]", {"spark.ui.showConsoleProgress": "false"})
    spark.sparkContext.setLogLevel("ERROR")
    queries = start(spark, url, folder)
    with rg.connect(url) as client:
        for query in queries:
            readergroup.spark.stop_at_end(query, client, [ORDERS, PAYMENTS])
    # Read with Spark, which knows what files of killed tasks do not count.
    paid = spark.read.parquet(f"{folder}/paid").select("id")
    rows, orders = paid.count(), paid.distinct().count()
    Path(folder, "paid.json").write_text(json.dumps({"rows": rows, "orders": orders}))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
