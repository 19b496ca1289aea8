# kvepp's image: one static program in an empty file system, run by a user who is not root. It writes nothing.
#
#   docker build -t kvepp:dev .
#
# BUILD_IMAGE is any Debian with Go 1.26, gcc and apt sources; set it if images come from a mirror. Its default is the
# first stage, which has Go by its digest (docs/security.md#the-image); BuildKit leaves that stage out if it is not used.
# Dependabot updates a FROM, but not an ARG. Without any base image, use manifests/image/import.sh.
ARG BUILD_IMAGE=go
FROM golang:1.26.8-bookworm@sha256:a688600ca24f8a4d3ca77f95b0dd40704a9fc787c826660eb7ba0b641b8b175d AS go

FROM ${BUILD_IMAGE} AS build
WORKDIR /src
COPY manifests/image/libzmq.sh manifests/image/
RUN manifests/image/libzmq.sh /libzmq
COPY go.mod go.sum ./
RUN go mod download
COPY . .
# The commit that `kvepp version` and the log print: the build does not see the git repository.
ARG COMMIT=
RUN LIBZMQ=/libzmq COMMIT=$COMMIT manifests/image/rootfs.sh /rootfs

# The stand-in engine of examples/compose: docker build --target engine. A build of kvepp leaves these two stages out.
FROM build AS engine-build
RUN LIBZMQ=/libzmq PROGRAM=examples/engine manifests/image/rootfs.sh /engine-rootfs

FROM scratch AS engine
COPY --from=engine-build /engine-rootfs/ /
USER 65532:65532
ENTRYPOINT ["/engine"]

FROM scratch
COPY --from=build /rootfs/ /
USER 65532:65532
EXPOSE 9002 9003 9090
ENTRYPOINT ["/kvepp"]
CMD ["help"]
