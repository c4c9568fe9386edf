from __future__ import annotations

_TIMEOUT_S = 3600.0  # a load has limits of its own


def reload(authority: str, model: str) -> None:
    """Unload and load a model, which gives it new front ends. Raise OSError if that fails.

    Over HTTP, Triton would hold up every connection that shares the thread of the call, and lose their answers.
    """
    import grpc  # slow, and seldom needed
    from tritonclient.grpc import service_pb2 as pb
    from tritonclient.grpc import service_pb2_grpc

    with grpc.insecure_channel(authority, options=[("grpc.enable_http_proxy", 0)]) as channel:
        triton = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            triton.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=model), timeout=_TIMEOUT_S)
            triton.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=model), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise OSError(f"{authority} answered {error.code().name}: {error.details()}") from None
