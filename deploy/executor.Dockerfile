# The executor with torch. Build from the checkout's root:
#   docker build -f deploy/executor.Dockerfile -t stepwire-executor .
# Where torch comes from, first that holds:
#   a folder of wheels     put torch-*.whl into deploy/wheels/cpu, or --build-arg TORCH_WHEELS=other/folder (inside the build
#                          context; engines since 23 also take --build-context wheels=/any/folder). Other wheels in it are
#                          taken before the index's: `pip download torch -d deploy/wheels/cuda` brings all of a CUDA build
#   an index               --build-arg TORCH_INDEX=URL; the default is PyTorch's index of CPU builds; empty: pip's own
#                          index, whose build for Linux x86-64 is CUDA's
# The CPU's kernels are built with the image, for every processor they know, and it keeps no compiler; one with a CUDA build
# of torch does, as Triton compiles what launches its kernels where they run. --build-arg COMPILER= leaves all that out, and
# no Debian mirror is needed: torch's own operators then compute the steps, slower.
# pip's configuration (a mirror, a proxy) comes as a secret: --secret id=pip,src=deploy/pip.conf

FROM scratch AS wheels
ARG TORCH_WHEELS=deploy/wheels/cpu
COPY ${TORCH_WHEELS} /

FROM python:3.11-slim AS torch
RUN python -m venv /opt/stepwire
ENV PATH=/opt/stepwire/bin:$PATH
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_VERSION=2.14.1
# What torch itself depends on follows with the rest, from the same folder and the usual index, under the constraints.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/wheels \
    if ls /wheels/torch-*.whl >/dev/null 2>&1; then \
        pip install --no-cache-dir --no-deps --no-index --find-links /wheels 'torch>=2.11'; \
    else \
        pip install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$TORCH_VERSION"; \
    fi

FROM torch AS deps
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY client/pyproject.toml client/
COPY deploy/requirements.py deploy/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/wheels \
    python -P deploy/requirements.py project executor hub > /tmp/requirements.txt \
    && pip install -c constraints.txt --find-links /wheels -r /tmp/requirements.txt setuptools

# Only what building the CPU's kernels reads, so that other changes build none.
FROM python:3.11-slim AS kernels
ARG COMPILER=g++
RUN if [ -n "$COMPILER" ]; then \
        apt-get update && apt-get install -y --no-install-recommends $COMPILER && rm -rf /var/lib/apt/lists/*; \
    fi
WORKDIR /src
COPY common/__init__.py common/errors.py common/
COPY common/model_files/__init__.py common/model_files/cache.py common/model_files/
COPY executor_svc/__init__.py executor_svc/environment.py executor_svc/
COPY executor_svc/kernels_cpu executor_svc/kernels_cpu
RUN mkdir /prebuilt && if [ -n "$COMPILER" ]; then python -m executor_svc.kernels_cpu.prebuild /prebuilt; fi

# The project alone, in a layer of its own that is small and changes often.
FROM deps AS code
COPY README.md LICENSE ./
COPY client client
COPY protos protos
COPY bench bench
COPY common common
COPY scheduler_svc scheduler_svc
COPY executor_svc executor_svc
COPY deploy/*.py deploy/
RUN pip install --no-deps --no-index --no-build-isolation --prefix /code ./client .

FROM python:3.11-slim
ARG COMPILER=g++
RUN --mount=type=bind,from=deps,source=/opt/stepwire,target=/deps \
    if [ -n "$COMPILER" ] && [ -d /deps/lib/python3.11/site-packages/triton ]; then \
        apt-get update && apt-get install -y --no-install-recommends $COMPILER && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --uid 10001 --user-group --create-home stepwire && install -d -o stepwire -g stepwire /models
COPY --from=deps /opt/stepwire /opt/stepwire
COPY --from=kernels /prebuilt /opt/stepwire/lib/python3.11/site-packages/executor_svc/kernels_cpu/prebuilt
COPY --from=code /code /opt/stepwire
USER 10001:10001
WORKDIR /home/stepwire
# Bytecode is compiled at install; the root file system may be read-only.
ENV PATH=/opt/stepwire/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    STEPWIRE_LISTEN=0.0.0.0:50052 XDG_CACHE_HOME=/models
EXPOSE 50052
# Loading a large model and warming up take minutes; failures in that time do not count.
HEALTHCHECK --interval=5s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "-P", "-m", "deploy.healthcheck"]
ENTRYPOINT ["python", "-P", "-m", "executor_svc"]
