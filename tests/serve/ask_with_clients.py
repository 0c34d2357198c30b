"""Asks a service with the clients of Triton and KServe and prints what they answered: ADDRESS INPUT
ROWS.npy.

It runs in an environment of its own, without fdbd: the clients ask for other versions of common
packages.
"""

from __future__ import annotations

import asyncio
import json
import sys

import kserve
import numpy as np
import tritonclient.http as triton

OUTPUTS = ("label", "score", "p_value", "is_ood")


def by_triton(address: str, name: str, rows: np.ndarray) -> dict[str, object]:
    client = triton.InferenceServerClient(address)
    about = client.get_model_metadata("guard")
    found: dict[str, object] = {
        "ready": client.is_server_live()
        and client.is_server_ready()
        and client.is_model_ready("guard"),
        "server": client.get_server_metadata()["name"],
        "inputs": about["inputs"],
        "outputs": [output["name"] for output in about["outputs"]],
    }
    for is_binary in (True, False):
        tensor = triton.InferInput(name, rows.shape, "FP32")
        tensor.set_data_from_numpy(rows, binary_data=is_binary)
        wanted = [triton.InferRequestedOutput(output, binary_data=is_binary) for output in OUTPUTS]
        answer = client.infer("guard", [tensor], outputs=wanted, request_id="7")
        found[f"binary={is_binary}"] = {
            output: answer.as_numpy(output).tolist() for output in OUTPUTS
        }
        found[f"id, binary={is_binary}"] = answer.get_response()["id"]
    try:
        client.infer(
            "guard",
            [
                triton.InferInput("other", [1, 2], "FP32").set_data_from_numpy(
                    np.zeros((1, 2), "f4")
                )
            ],
        )
    except triton.InferenceServerException as error:
        found["refusal"] = error.message()
    return found


async def by_kserve(address: str, name: str, rows: np.ndarray) -> dict[str, object]:
    client = kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2"))
    url = f"http://{address}"
    found: dict[str, object] = {
        "ready": await client.is_server_ready(url)
        and await client.is_server_live(url)
        and await client.is_model_ready(url, "guard")
    }
    for is_binary in (True, False):
        tensor = kserve.InferInput(name, list(rows.shape), "FP32")
        tensor.set_data_from_numpy(rows, binary_data=is_binary)
        answer = await client.infer(url, kserve.InferRequest("guard", [tensor]), model_name="guard")
        values = {output.name: output.as_numpy().tolist() for output in answer.outputs}
        found[f"binary={is_binary}"] = {output: values[output] for output in OUTPUTS}
    return found


if __name__ == "__main__":
    address, name, path = sys.argv[1:]
    rows = np.load(path)
    found = {
        "triton": by_triton(address, name, rows),
        "kserve": asyncio.run(by_kserve(address, name, rows)),
    }
    print(json.dumps(found))
