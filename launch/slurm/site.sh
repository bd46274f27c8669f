# What differs between sites: the one place to set account, partition and image. Read by the other
# scripts here; each line may also come from the environment.

# Options of sbatch for every job (by submit.sh), such as: --account=ACCOUNT --partition=PARTITION --qos=QOS
XMOD_SBATCH=${XMOD_SBATCH:-}

# CPUs and memory (in GB) for each GPU that a job asks for, where it names no --cpus-... or --mem itself:
# Slurm alone would give a node's GPUs one CPU. Empty: leave it to the site's own defaults.
XMOD_CPUS_PER_GPU=${XMOD_CPUS_PER_GPU-8}
XMOD_GB_PER_GPU=${XMOD_GB_PER_GPU-60}

# The command that runs what follows in a container, such as: apptainer exec --nv IMAGE
# It stands behind srun, and must not be srun itself. By default launch/local.sh, which makes a virtual
# environment in the checkout.
XMOD_RUN=${XMOD_RUN:-launch/local.sh}

# Seconds before the time limit at which the run is asked to save and leave.
XMOD_NOTICE=${XMOD_NOTICE:-180}
