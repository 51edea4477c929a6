# The gateway with its attention workers, and the command line.
#
#   docker build -f deploy/images/gateway.Dockerfile -t expertmesh/gateway:0.1.0 \
#     --build-arg TORCH_INDEX_URL=URL .
#   docker build -f deploy/images/gateway.Dockerfile -t expertmesh/gateway:0.1.0-cuda \
#     --build-arg VARIANT=cuda .
#
# VARIANT          cpu or cuda.
# TORCH_INDEX_URL  Where torch comes from; for cpu that of its wheels without CUDA, from PyTorch's
#                  installation page. Empty: where pip looks anyway.
# PYTHON_IMAGE     A Debian image with Python; name a digest for builds that can be repeated.
ARG VARIANT=cpu
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG VARIANT
ARG TORCH_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv --without-pip /opt/expertmesh
WORKDIR /src
COPY constraints.txt ./
# torch first, as it is most of the image and changes least.
RUN pip --python /opt/expertmesh/bin/python install -c constraints.txt \
      ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
RUN if [ "$VARIANT" = cpu ] && pip --python /opt/expertmesh/bin/python list | grep -q '^nvidia'; \
    then echo "error: this torch brings CUDA along; fix: --build-arg TORCH_INDEX_URL=..." >&2; \
    exit 1; fi
COPY pyproject.toml README.md LICENSE ./
COPY expertmesh ./expertmesh
COPY gateway ./gateway
COPY attention_worker ./attention_worker
COPY expert_worker ./expert_worker
COPY kernels ./kernels
RUN extras=gateway,worker,k8s; [ "$VARIANT" = cpu ] || extras="$extras,gpu"; \
    pip --python /opt/expertmesh/bin/python install -c constraints.txt ".[$extras]"

FROM ${PYTHON_IMAGE} AS runtime
# Libraries ask for the name and home of their user, so it has to exist.
RUN groupadd --gid 10001 expertmesh && \
    useradd --uid 10001 --gid 10001 --home-dir /home/expertmesh --create-home \
      --shell /usr/sbin/nologin expertmesh
COPY --from=build /opt/expertmesh /opt/expertmesh
# Memory in huge pages, threads that wait without spinning: as ExpertMesh starts its own children.
ENV PATH=/opt/expertmesh/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    OMP_WAIT_POLICY=passive \
    GRPC_ENABLE_FORK_SUPPORT=false \
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=67108864:glibc.malloc.trim_threshold=67108864
WORKDIR /home/expertmesh
EXPOSE 8000 50051

FROM runtime AS final-cpu

FROM runtime AS final-cuda
# Triton compiles a small module for the driver that it finds, at the first start on a machine.
RUN apt-get update && \
    apt-get install -y --no-install-recommends gcc libc6-dev && \
    rm -rf /var/lib/apt/lists/*

FROM final-${VARIANT}
USER 10001:10001
ENTRYPOINT ["expertmesh"]
CMD ["gateway", "--help"]
