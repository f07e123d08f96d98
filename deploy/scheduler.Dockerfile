# The scheduler: no torch, about 400 MB. Build from the checkout's root:
#   docker build -f deploy/scheduler.Dockerfile -t stepwire-scheduler .
# pip's configuration (a mirror, a proxy) comes as a secret: --secret id=pip,src=deploy/pip.conf

FROM python:3.11-slim AS deps
RUN python -m venv /opt/stepwire
ENV PATH=/opt/stepwire/bin:$PATH
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY client/pyproject.toml client/
COPY deploy/requirements.py deploy/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/root/.cache/pip \
    python -P deploy/requirements.py project scheduler hub > /tmp/requirements.txt \
    && pip install -c constraints.txt -r /tmp/requirements.txt setuptools

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
RUN useradd --uid 10001 --user-group --create-home stepwire && install -d -o stepwire -g stepwire /models
COPY --from=deps /opt/stepwire /opt/stepwire
COPY --from=code /code /opt/stepwire
USER 10001:10001
WORKDIR /home/stepwire
# Bytecode is compiled at install; the root file system may be read-only.
ENV PATH=/opt/stepwire/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    STEPWIRE_LISTEN=0.0.0.0:50051 XDG_CACHE_HOME=/models
EXPOSE 50051
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-P", "-m", "deploy.healthcheck"]
ENTRYPOINT ["python", "-P", "-m", "scheduler_svc"]
