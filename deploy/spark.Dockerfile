# Spark with readergroup, for the driver and the executors on Kubernetes. Build it from the root of the repository, with
# the Spark of your cluster, 4.2 or newer:
#
#     docker build --file deploy/spark.Dockerfile --build-arg SPARK=apache/spark:4.3.0 --tag readergroup-spark .
#     spark-submit --master k8s://https://HOST:6443 --deploy-mode cluster \
#         --conf spark.kubernetes.container.image=readergroup-spark local:///opt/job.py

ARG SPARK=apache/spark:4.3.0
FROM ${SPARK} AS spark

# The Python of Spark's images may be older than 3.11.
FROM python:3.13-slim-trixie
RUN apt-get update && apt-get install --yes --no-install-recommends openjdk-21-jre-headless procps tini \
    && rm -rf /var/lib/apt/lists/*
COPY --from=spark /opt/spark /opt/spark
COPY --from=spark /opt/entrypoint.sh /opt/entrypoint.sh
COPY pyproject.toml README.md LICENSE /build/
COPY synchronizer /build/synchronizer
COPY notifications /build/notifications
COPY readergroup /build/readergroup
RUN pip install --no-cache-dir '/build[spark-worker,postgres,nats]' && rm -r /build
ENV SPARK_HOME=/opt/spark PATH=$PATH:/opt/spark/bin JAVA_HOME=/usr/lib/jvm/java-21-openjdk-amd64 \
    PYSPARK_PYTHON=/usr/local/bin/python3
WORKDIR /opt/spark/work-dir
USER 185
ENTRYPOINT ["/opt/entrypoint.sh"]
