# The current NGC Triton image with Tidewheel in it. Built for CUDA; it runs on a CPU as well (docker-compose.yml).
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.09-py3
FROM ${TRITON_IMAGE}

# Debian and Ubuntu keep pip away from the system's Python, which is that of Triton's Python backend.
ENV PIP_BREAK_SYSTEM_PACKAGES=1

WORKDIR /opt/tidewheel
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY backend backend
COPY kernels kernels
COPY client client
COPY process process
COPY queue queue
RUN pip install --no-cache-dir .

COPY model_repository model_repository

# Triton's image runs as root unless told otherwise. Compiled kernels go below the cache, the only folder to be written
# beside /tmp: all others may be mounted read only.
RUN groupadd --gid 10001 tidewheel \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/tidewheel tidewheel \
    && install --directory --owner 10001 --group 10001 /var/cache/tidewheel
ENV XDG_CACHE_HOME=/var/cache/tidewheel TRITON_CACHE_DIR=/var/cache/tidewheel/triton
USER 10001:10001

EXPOSE 8000 8001 8002 8003
HEALTHCHECK --start-period=120s --interval=5s --timeout=3s CMD ["curl", "--fail", "--silent", "http://127.0.0.1:8003/ready"]
# Inside a container the ports must be reachable from outside it; compose publishes them on the host's loopback.
ENTRYPOINT ["tidewheel", "serve", "--host", "0.0.0.0"]
CMD ["--model-repository", "model_repository", "--models", "demo,demo_infer"]
