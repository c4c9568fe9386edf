# The current NGC Triton image with Tidewheel in it. Built for CUDA; it runs on a CPU as well (docker-compose.yml).
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.09-py3
FROM ${TRITON_IMAGE}

WORKDIR /opt/tidewheel
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY backend backend
COPY kernels kernels
COPY client client
RUN pip install --no-cache-dir .

COPY model_repository model_repository

# Triton's image runs as root unless told otherwise; a server of model files needs no such rights.
RUN useradd --create-home tidewheel && chown -R tidewheel model_repository
USER tidewheel

EXPOSE 8000 8001 8002 8003
HEALTHCHECK --start-period=120s --interval=5s --timeout=3s CMD ["curl", "--fail", "--silent", "http://127.0.0.1:8003/ready"]
# Inside a container the ports must be reachable from outside it; compose publishes them on the host's loopback.
ENTRYPOINT ["tidewheel", "serve", "--host", "0.0.0.0"]
CMD ["--model-repository", "model_repository", "--models", "demo,demo_infer"]
