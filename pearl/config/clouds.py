"""`cluster.ec2`, `cluster.gcp`, `cluster.azure`, `cluster.kubernetes`: machines that are bought by the hour."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from pearl.config.section import Section

SHORTEST_S = 600.0
"""A machine that lives less long never serves."""


class MachinesConfig(Section):
    """What all clouds' virtual machines have in common. Their image has this repository, its environment and the model
    at the same paths as `directory`, `python` and `model.path` say."""

    directory: str = "/opt/pearl"
    """Folder of this repository in the machine's image (or in `container`)."""
    python: str = "/opt/pearl/.venv/bin/python"
    """Python there."""
    container: str | None = None
    """Container image with PEARL in it, run by the machine's Docker with the host's network and all GPUs; none: the
    machine's own image has it."""
    setup: tuple[str, ...] = ()
    """Shell lines that the machine runs as root before the worker starts, e.g. a mount. No place for secrets."""
    labels: dict[str, str] = Field({})
    """More tags (labels) of each machine."""
    lifetime_s: float = Field(86400.0, ge=SHORTEST_S)
    """A machine gets notice after this time, whatever happens, and its certificate is worth nothing soon after."""
    boot_s: float = Field(600.0, gt=0)
    """Seconds from the request until its worker has joined, beside `deadlines.worker_start_s`."""


class Ec2Config(MachinesConfig):
    region: str | None = None
    """None: that of your AWS configuration (`AWS_DEFAULT_REGION`, profile)."""
    instance_types: tuple[str, ...] = ()
    """Instance types, best first. Each has the GPUs of one engine (`engine.tensor_parallel`)."""
    places: tuple[str, ...] = ()
    """Where to ask, best first: availability zones of the default VPC (`us-east-1a`) or subnets (`subnet-…`); none: EC2
    chooses. All types are asked for in the first place, then in the second."""
    image: str | None = None
    """AMI with PEARL in it; none: the launch template says."""
    security_groups: tuple[str, ...] = ()
    """Security groups (`sg-…`); none: the launch template says. They must let machines and this host reach each other,
    and nobody else."""
    launch_template: str | None = None
    """Name or id of a launch template, `name:version` for one that is not the default. It says all that is not set
    here: image, network, disks, key, instance profile."""
    spot: bool = True
    """False buys on-demand machines."""
    max_price_usd: float | None = Field(None, gt=0)
    """Highest USD per hour for a spot machine; None is the on-demand price."""
    disk_gb: int | None = Field(None, ge=8)
    """Root disk (gp3, encrypted); None is what image or template say."""
    root_device: str = "/dev/sda1"
    """Name of the root disk in the image, where `disk_gb` is set (`/dev/xvda` for Amazon Linux)."""
    instance_profile: str | None = None
    """Name of an instance profile, if machines are to have rights of their own (to read weights from S3, say)."""
    public_address: bool = False
    """Give machines a public address: where their subnet has no NAT and this host is not in the VPC."""
    endpoint_url: str | None = None
    """Another EC2 endpoint than AWS's own."""

    def fault(self) -> str | None:
        if not self.instance_types:
            return "cluster.ec2.instance_types is empty; name at least one, e.g. [g6e.xlarge]"
        if self.launch_template is None:
            for key in ("image", "security_groups"):
                if not getattr(self, key):
                    return f"cluster.ec2.{key} is not set; name it, or a launch_template that says it"
        return repeated("cluster.ec2", self, "instance_types", "places")


class GcpConfig(MachinesConfig):
    project: str = ""
    """Id of the project that pays."""
    machine_types: tuple[str, ...] = ()
    """Machine types, best first. Each has the GPUs of one engine, its own (`g2-standard-8`) or by `accelerator`."""
    zones: tuple[str, ...] = ()
    """Zones, best first, e.g. `us-central1-a`. All types are asked for in the first zone, then in the second."""
    image: str = ""
    """Image with PEARL in it: a name in your project, or `projects/…/global/images/…`."""
    accelerator: str | None = None
    """GPU that is attached to machines without their own, e.g. `nvidia-tesla-t4`, as many as an engine has."""
    network: str = "default"
    """Subnetwork of the zone's region. Its firewall lets machines and this host reach each other, and nobody else."""
    spot: bool = True
    """False buys standard machines."""
    disk_gb: int = Field(100, ge=10)
    """Boot disk."""
    disk_type: str = "pd-balanced"
    """Kind of the boot disk."""
    service_account: str | None = None
    """E-mail address of a service account, if machines are to have rights of their own."""
    public_address: bool = False
    """Give machines a public address."""
    endpoint_url: str | None = None
    """Another Compute Engine endpoint than Google's own; asked without credentials."""

    def fault(self) -> str | None:
        for key in ("project", "machine_types", "zones", "image"):
            if not getattr(self, key):
                return f"cluster.gcp.{key} is not set"
        return repeated("cluster.gcp", self, "machine_types", "zones")


class AzureConfig(MachinesConfig):
    subscription: str | None = None
    """Id of the subscription that pays; None takes AZURE_SUBSCRIPTION_ID."""
    resource_group: str = ""
    """An existing resource group, for everything that is started."""
    location: str = ""
    """Region of the group's network, e.g. `westeurope`."""
    sizes: tuple[str, ...] = ()
    """Machine sizes, best first. Each has the GPUs of one engine."""
    zones: tuple[str, ...] = ()
    """Availability zones (`1`, `2`, `3`), best first; none: Azure chooses. All sizes are asked for in the first zone,
    then in the second."""
    image: str = ""
    """Resource id of an image with PEARL in it."""
    vnet: str = ""
    """An existing virtual network of the group."""
    subnet: str | None = None
    """Resource id of one of its subnets; None takes the first."""
    security_group: str = ""
    """An existing network security group. It lets machines and this host reach each other, and nobody else."""
    spot: bool = True
    """False buys standard machines."""
    max_price_usd: float | None = Field(None, gt=0)
    """Highest USD per hour for a spot machine; None is the standard price."""
    disk_gb: int = Field(128, ge=30)
    """OS disk."""
    public_address: bool = False
    """Give machines a public address."""

    def fault(self) -> str | None:
        for key in ("resource_group", "location", "sizes", "image", "vnet", "security_group"):
            if not getattr(self, key):
                return f"cluster.azure.{key} is not set"
        return repeated("cluster.azure", self, "sizes", "zones")


class KubernetesConfig(Section):
    image: str = ""
    """Container image with this repository, its environment and the model, at the paths of this machine."""
    namespace: str = "default"
    """Namespace of the pods, which exists."""
    node_pools: tuple[dict[str, str], ...] = ({},)
    """Node selectors, best first, e.g. `{karpenter.sh/capacity-type: spot, karpenter.k8s.aws/instance-family: g6e}`. A
    pod that stays unscheduled for `pending_s` is asked for with the next one."""
    tolerations: tuple[dict[str, str], ...] = ()
    """Tolerations of the pods, e.g. `{key: cloud.google.com/gke-spot, operator: Equal, value: "true", effect:
    NoSchedule}`."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource of which a pod asks for the GPUs of one engine."""
    cpu: str = "4"
    """CPU cores of a pod."""
    memory: str = "32Gi"
    """Memory of a pod."""
    shared_memory: str = "8Gi"
    """Size of its `/dev/shm`, part of `memory`."""
    grace_s: int = Field(25, ge=5)
    """Notice: seconds from a node's preemption until the pod is killed (`terminationGracePeriodSeconds`). Clouds take
    the node after 15 to 120 s whatever this says."""
    python: str | None = None
    """Python in the image; none: the path of this one."""
    directory: str | None = None
    """Working directory in the image; none: that of this process."""
    service_account: str | None = None
    """Service account of the pods; none: the namespace's default. Its token is not mounted."""
    pull_secrets: tuple[str, ...] = ()
    """Names of secrets with which the image is pulled."""
    labels: dict[str, str] = Field({})
    """More labels of each pod."""
    lifetime_s: float = Field(86400.0, ge=SHORTEST_S)
    """A pod gets notice after this time, whatever happens, and its certificate is worth nothing soon after."""
    pending_s: float = Field(600.0, gt=0)
    """Seconds that a pod may wait for a node and its image before its request failed."""
    context: str | None = None
    """Context of your kubeconfig; None: the current one, or the pod's own service account."""

    def fault(self) -> str | None:
        if not self.image:
            return "cluster.kubernetes.image is not set"
        if not self.node_pools:
            return "cluster.kubernetes.node_pools is empty; leave it out to take any node"
        return repeated("cluster.kubernetes", self, "node_pools")


def repeated(section: str, config: Any, *keys: str) -> str | None:
    for key in keys:
        values = [str(value) for value in getattr(config, key)]
        for value in values:
            if values.count(value) > 1:
                return f"{section}.{key} names {value} twice"
    return None
