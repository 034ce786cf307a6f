"""Streams: ordered by routing key, partitioned into segments, scaled while writers and readers run."""

from .config import KeyRange as KeyRange
from .config import ScalingPolicy as ScalingPolicy
from .config import SegmentId as SegmentId
from .config import StreamConfig as StreamConfig
from .config import StreamCut as StreamCut
from .config import StreamInfo as StreamInfo
from .data.block import MAX_EVENT_BYTES as MAX_EVENT_BYTES
from .data.block import Block as Block
from .data.block import Headers as Headers
from .data.segment_reader import SegmentReader as SegmentReader
from .manager import StreamManager as StreamManager
from .serializers import BytesSerializer as BytesSerializer
from .serializers import JsonSerializer as JsonSerializer
from .serializers import MsgpackSerializer as MsgpackSerializer
from .serializers import PydanticSerializer as PydanticSerializer
from .serializers import Serializer as Serializer
from .state import StreamState as StreamState
from .transactions.staging import StagedPart as StagedPart
from .transactions.staging import Staging as Staging
from .transactions.transaction import Transaction as Transaction
from .transactions.transaction import Transactions as Transactions
from .writing.writer import EventWriter as EventWriter
